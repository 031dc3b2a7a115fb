"""TGI's own gRPC services, ``generate.v2`` and ``generate.v3``: the caller requests each step."""
