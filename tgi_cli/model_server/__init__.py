"""The model server's process: the engine, its gRPC server, startup and failure."""
