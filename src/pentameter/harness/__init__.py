"""Tasks of lm-evaluation-harness (`lm-eval`), run on a pentameter model in this process."""
