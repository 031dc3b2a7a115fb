"""The wire between router and model server: ``engine.proto``, its client, and what both ends share.

The ``*_pb2*`` files here and in :mod:`tgi_cli.tgi_grpc` are generated from the ``.proto`` files.
After a change, generate them from the root of the repository, with the oldest grpcio-tools that the
package's dependencies allow, so that they run with all newer versions:

    pip install grpcio-tools==1.80.0
    python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
tgi_cli/rpc/*.proto tgi_cli/tgi_grpc/*.proto
"""
