"""A seed for each branch of a request with n > 1."""

from hashlib import blake2b


def branch_seed(seed: int, branch: int) -> int:
    """The seed of one of n branches: alone, a request with it gives the same text. Branch 0 keeps its request's own."""
    if branch == 0:
        return seed
    digest = blake2b(f"{seed}/{branch}".encode(), digest_size=8, person=b"kvmesh.n").digest()
    return int.from_bytes(digest, "little")
