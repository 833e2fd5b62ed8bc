"""What this machine reaches, measured for the planner."""
