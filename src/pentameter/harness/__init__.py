"""lm-evaluation-harness (`lm-eval`): its tasks, run on a pentameter model in this process."""
