"""The models of an app: where they are found, and which of them are loaded."""
