"""lm-evaluation-harness (`lm-eval`) with a model of ours, in this process."""
