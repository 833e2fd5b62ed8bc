"""HTTP server for models, with OpenAI's interface."""
