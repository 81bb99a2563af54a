import os

# Set before grpc is imported. Its fork handlers would only write warnings, because child processes exec at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
