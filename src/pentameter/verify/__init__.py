"""Verification that a configuration trains identically on every layout: `pentameter verify`."""
