import os

# Before grpc is imported, which reads it once. Our child processes exec at once, and grpc's fork handlers would
# write warnings.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
