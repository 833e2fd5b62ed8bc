"""Checkpoints of other training programs, read into a StoredModel: nanoGPT, nanochat, litgpt and
llm.c."""
