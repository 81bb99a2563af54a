import os

# Before grpc is imported. Child processes exec at once, and grpc's fork handlers would only write warnings.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
