"""cubins: the kernels of one kind of GPU as machine code, of which --define kernels=... says how many programs hold."""

# Actions that share the compilation of an archive.
SHARDS = {"sample": 2, "rest": 6}
GPUS = ["70", "80", "90"]

def kernel_choices():
    """What --define kernels= may say: "sample", "none", a GPU's "80"; all kernels without it."""
    for choice in ["sample", "none"] + GPUS:
        native.config_setting(name = "kernels_are_" + choice, define_values = {"kernels": choice})

def _compile(gpu, rows, shard):
    name = "cubins_%s_%s_%d" % (gpu, rows, shard)
    flags = "--gpu=%s --rows=%s --shard=%d --shards=%d" % (gpu, rows, shard, SHARDS[rows])
    native.genrule(
        name = name,
        srcs = ["@nvidia//:nvrtc_libraries"],
        outs = [name + ".cubins"],
        cmd = "$(location :compile_cubins) %s --out=$@ --nvrtc=$$(ls $(SRCS) | grep 'libnvrtc.so')" % flags,
        exec_tools = [":compile_cubins"],
        tags = ["manual"],
    )
    return ":" + name

def cubins(gpu):
    """kernels_GPU.cubins: the archive that programs hold.

    Args:
      gpu: compute capability, "80". Later GPUs of its generation run the code too.
    """
    parts = {rows: [_compile(gpu, rows, shard) for shard in range(SHARDS[rows])] for rows in SHARDS}
    every = parts["sample"] + parts["rest"]
    choices = {":kernels_are_" + other: every if other == gpu else [] for other in GPUS}
    choices[":kernels_are_sample"] = parts["sample"]
    choices[":kernels_are_none"] = []
    choices["//conditions:default"] = every
    native.genrule(
        name = "cubins_" + gpu,
        srcs = select(choices),
        outs = ["kernels_%s.cubins" % gpu],
        cmd = "$(location :join_cubins) %s $@ $(SRCS)" % gpu,
        exec_tools = [":join_cubins"],
    )
