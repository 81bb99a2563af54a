import os

# Set before grpc is imported, whose fork handlers would only write warnings: child processes exec at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
