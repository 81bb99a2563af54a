"""The engine beside asyncio: its loop, log and profiler."""
