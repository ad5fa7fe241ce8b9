"""cubins and locks: the kernels as machine code, and kernels.lock. --define kernels=... says which kernels programs hold."""

GPUS = ["70", "80", "90"]

# Actions that share the compilation of a GPU's kernels: of the sample (kernel_sample.h), and of all others.
SHARDS = {"sample": 2, "rest": 6}

def kernel_choices():
    """Declares what --define kernels= may say: "sample", "none", a GPU's "80"; programs hold all kernels without it."""
    for choice in ["sample", "none"] + GPUS:
        native.config_setting(name = "kernels_are_" + choice, define_values = {"kernels": choice})

def _parts(gpu, rows):
    return ["cubins_%s_%s_%d" % (gpu, rows, shard) for shard in range(SHARDS[rows])]

def _compile(gpu, rows):
    for shard, name in enumerate(_parts(gpu, rows)):
        flags = "--gpu=%s --rows=%s --shard=%d --shards=%d" % (gpu, rows, shard, SHARDS[rows])
        native.genrule(
            name = name,
            srcs = ["@nvidia//:nvrtc_libraries"],
            outs = [name + ".archive"],
            cmd = "$(location :compile_cubins) %s --out=$@ --nvrtc=$$(ls $(SRCS) | grep 'libnvrtc.so')" % flags,
            exec_tools = [":compile_cubins"],
            tags = ["manual"],
        )

def cubins(gpu):
    """kernels_GPU.cubins: the archive that programs hold.

    Args:
      gpu: compute capability, "80". Later GPUs of its generation run the code too.
    """
    for rows in SHARDS:
        _compile(gpu, rows)
    every = _parts(gpu, "sample") + _parts(gpu, "rest")
    choices = {":kernels_are_" + other: every if other == gpu else [] for other in GPUS}
    choices[":kernels_are_sample"] = _parts(gpu, "sample")
    choices[":kernels_are_none"] = []
    choices["//conditions:default"] = every
    native.genrule(
        name = "cubins_" + gpu,
        srcs = select(choices),
        outs = ["kernels_%s.cubins" % gpu],
        cmd = "$(location :join_cubins) %s $@ $(SRCS)" % gpu,
        exec_tools = [":join_cubins"],
    )

def _lock(name, kernels, tags):
    parts = [part for gpu in GPUS for rows in kernels for part in _parts(gpu, rows)]
    native.genrule(
        name = name,
        srcs = [":device_digest"] + parts,
        outs = [name + ".txt"],
        cmd = "sh $(location print_lock.sh) $(SRCS) > $@",
        tools = ["print_lock.sh"],
        tags = ["manual"],
    )
    native.sh_test(
        name = name + "_test",
        size = "small",
        srcs = ["lock_test.sh"],
        args = ["$(location kernels.lock)", "$(location :%s)" % name, "all" if "rest" in kernels else "sample"],
        data = ["kernels.lock", ":" + name],
        tags = tags,
    )

def locks():
    """whole_lock, kernels.lock as it should be, and sample_lock; their tests compare kernels.lock with them."""
    _lock("sample_lock", ["sample"], [])
    _lock("whole_lock", ["sample", "rest"], ["rare"])
