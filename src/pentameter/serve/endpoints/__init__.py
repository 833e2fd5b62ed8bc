"""OpenAI's endpoints: what each takes, and how it answers."""
