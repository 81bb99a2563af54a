"""Print NIXL's plugins here as a JSON list: `python -m components.kv_transfer.list_plugins`."""

import json
import os
import sys

from components.kv_transfer.ucx_settings import leave_out_rdma

if __name__ == "__main__":
    leave_out_rdma()  # before UCX loads
    from components.kv_transfer.nixl_api import nixl_agent, nixl_agent_config

    agent = nixl_agent("doctor", nixl_agent_config(backends=[]))
    sys.stdout.write(json.dumps(sorted(agent.get_plugin_list())) + "\n")
    sys.stdout.flush()
    os._exit(0)  # UCX's modules may end an exiting process with SIGSEGV
