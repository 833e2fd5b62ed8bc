"""The one package that sees both the model and the devices it runs on."""
