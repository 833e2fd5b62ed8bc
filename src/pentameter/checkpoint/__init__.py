"""Checkpoints, saved and loaded by tensor name and committed atomically, and model folders. The
package imports torch late."""
