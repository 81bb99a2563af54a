"""python -m services.rank: a follower of a worker on several devices, with its end of the KV transfers."""

from components.kv_transfer.rank_end import serve_rank
from engine.parallel.rank_process import main

if __name__ == "__main__":
    main(serve_rank)
