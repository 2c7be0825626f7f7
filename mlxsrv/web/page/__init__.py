"""The page at `GET /`: its files, and the headers that keep a browser from anything else."""
