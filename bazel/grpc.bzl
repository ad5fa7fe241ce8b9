"""cc_grpc_library: a service's C++ stub. Bazel's own rules know nothing of gRPC; the code comes from Debian's plug-in."""

load("@rules_cc//cc:defs.bzl", "cc_library")

def cc_grpc_library(name, src, deps, imports = []):
    """The library NAME of SRC.grpc.pb.{h,cc}.

    Args:
      name: of the library.
      src: one .proto file of this package that declares the service.
      deps: the cc_proto_library of that file.
      imports: the .proto files that it imports, by their paths below proto/.
    """
    stem = src[:-len(".proto")]
    outs = [stem + ".grpc.pb.h", stem + ".grpc.pb.cc"]
    native.genrule(
        name = name + "_src",
        srcs = [src] + imports,
        outs = outs,
        cmd = "$(location @system//:bin/protoc) -I. -Iproto" +
              " --plugin=protoc-gen-grpc=$(location @system//:bin/grpc_cpp_plugin)" +
              " --grpc_out=generate_mock_code=false:$(GENDIR) $(location %s)" % src,
        tools = ["@system//:bin/grpc_cpp_plugin", "@system//:bin/protoc"],
    )
    cc_library(name = name, srcs = outs[1:], hdrs = outs[:1], deps = deps + ["@system//:grpc"])
