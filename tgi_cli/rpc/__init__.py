"""The wire between router and model server. Nothing but translation.

``engine_pb2*`` are generated from ``engine.proto`` and kept in the tree. After a change of the
proto, write them anew from the root of the repository (the oldest grpcio-tools that the
package's dependencies allow, so that the result runs with all newer ones):

    pip install grpcio-tools==1.80.0
    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
tgi_cli/rpc/engine.proto
"""
