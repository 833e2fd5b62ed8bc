"""Corpora by name, and text as documents: files, folders, JSONL records, generators."""
