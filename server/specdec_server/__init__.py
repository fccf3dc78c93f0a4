"""One FastAPI application over a folder of shards and training runs. Imports neither torch nor vllm."""
