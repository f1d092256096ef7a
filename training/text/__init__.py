"""Public-domain text that ships with the package; see README.md for where it comes from."""
