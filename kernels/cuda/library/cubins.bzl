"""cubins: the kernels of one kind of GPU as machine code."""

def cubins(gpu):
    """cubins_GPU, the archive kernels_GPU.cubins: all that are shipped for it; packed_GPU, what programs hold of it.

    Args:
      gpu: compute capability, "80". Later GPUs of its generation run the code too.
    """
    native.genrule(
        name = "cubins_" + gpu,
        srcs = ["@nvidia//:nvrtc_libraries"],
        outs = ["kernels_%s.cubins" % gpu],
        cmd = "$(location :compile_cubins) --gpu=%s --out=$@ --nvrtc=$$(ls $(SRCS) | grep 'libnvrtc.so')" % gpu,
        exec_tools = [":compile_cubins"],
    )
    native.genrule(
        name = "packed_" + gpu,
        srcs = [":cubins_" + gpu],
        outs = ["kernels_%s.packed" % gpu],
        cmd = "$(location :pack_cubins) $< $@",
        exec_tools = [":pack_cubins"],
    )
