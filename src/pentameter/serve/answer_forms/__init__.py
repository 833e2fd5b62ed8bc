"""What families of models write in an answer beside its content: reasoning and calls of tools."""
