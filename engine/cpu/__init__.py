"""The machine's cores, threads and memory."""
