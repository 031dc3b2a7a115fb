"""The wire between router and model server. Nothing but translation.

``*_pb2*`` are generated from the ``.proto`` files and kept in the tree. After a change of one,
write them anew from the root of the repository (the oldest grpcio-tools that the
package's dependencies allow, so that the result runs with all newer ones):

    pip install grpcio-tools==1.80.0
    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
tgi_cli/rpc/*.proto

``engine.proto`` is the project's own, ``generate_v2.proto`` and ``generate_v3.proto`` are those of
text-generation-inference; all are served on one socket.
"""
