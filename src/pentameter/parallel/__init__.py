"""The one place that sees both the model and the devices it runs on."""
