import os

# Before anything imports grpc, which looks only once. Processes that we start become another program at once, and need none
# of grpc's handlers at a fork; these would complain on stderr of every one.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
