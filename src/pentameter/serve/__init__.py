"""A server of models over HTTP, with OpenAI's interface."""
