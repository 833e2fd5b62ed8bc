"""Records in files: JSON arrays, fields, rows that cannot be read, and the forms that conversations
have."""
