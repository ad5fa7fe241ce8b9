"""cubins: the kernels of one architecture as machine code for one target."""

def cubins(target, architecture, only = "", **kwargs):
    """cubins_TARGET, the archive kernels_TARGET.cubins.

    Args:
      target: the GPUs that run it, "sm_90". Code of an earlier architecture runs there too, exactly but slowly.
      architecture: whose rows of kernels/tiles.cc, "sm70".
      only: part of the names of those rows; empty: all that are shipped.
      **kwargs: of the genrule.
    """
    native.genrule(
        name = "cubins_" + target,
        srcs = ["@nvidia//:nvrtc_libraries"],
        outs = ["kernels_%s.cubins" % target],
        cmd = "$(location :compile_cubins) --architecture=%s --target=%s --only=%s" % (architecture, target, only) +
              " --out=$@ --nvrtc=$$(ls $(SRCS) | grep 'libnvrtc.so')",
        exec_tools = [":compile_cubins"],
        **kwargs
    )
