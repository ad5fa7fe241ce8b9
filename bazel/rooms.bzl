"""room and room_test: a folder is one library and one test, each compiled as one translation unit.

Most of a source's compilation is reading headers that its neighbours read too, so the sources of a folder are compiled
together. Names without linkage must therefore differ within a folder. `--define rooms=apart` compiles each file alone,
which shows a header that does not include what it needs.
"""

load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")

def _folder():
    return native.package_name().split("/")[-1]

def _together(name, srcs, suffix):
    """`srcs` as one source, for cc_library's and cc_test's `srcs`; compilers name the places in the original files."""
    if len(srcs) < 2:
        return srcs
    native.genrule(
        name = name + "_together",
        srcs = srcs,
        outs = [name + suffix],
        cmd = "for f in $(SRCS); do echo \"#line 1 \\\"$$f\\\"\"; cat $$f; done > $@",
        visibility = ["//visibility:private"],
    )
    return select({"//bazel:apart": srcs, "//conditions:default": [name + suffix]})

def room(name = None, srcs = None, hdrs = None, exclude = [], apart = [], copts_of = {}, deps = [], **kwargs):
    """The library of a folder.

    Args:
      name: of the library; the folder's own by default, so that //server/wire names it.
      srcs: the sources; by default every .cc that is no test, benchmark or fuzzer.
      hdrs: the headers; by default every .h.
      exclude: files that the defaults leave out, those of other rules.
      apart: sources that are compiled alone: those that include themselves for each vector target, and those that take
        the compiler minutes.
      copts_of: {source: options of its own}; such a source is compiled alone.
      deps: libraries. Abseil is every room's.
      **kwargs: as cc_library's.
    """
    name = name or _folder()
    alone = apart + copts_of.keys()
    if hdrs == None:
        hdrs = native.glob(["*.h"], exclude = exclude)
    if srcs == None:
        srcs = native.glob(["*.cc"], exclude = exclude + ["*_test.cc", "*_benchmark.cc", "*_fuzzer.cc"])
    srcs = [source for source in srcs if source not in alone]
    deps = deps + ["@system//:absl"]
    objects = []
    for source, copts in copts_of.items():
        objects.append(source[:-len(".cc")])
        cc_library(name = objects[-1], srcs = [source] + hdrs, copts = copts, deps = deps)
    cc_library(
        name = name,
        srcs = _together(name, srcs, "_together.cc") + apart,
        hdrs = hdrs,
        deps = deps + [":" + part for part in objects],
        **kwargs
    )

def room_test(name = None, srcs = None, exclude = [], apart = [], of = None, deps = [], **kwargs):
    """The tests of a folder, as one program.

    Args:
      name: of the test; by default the folder's with _test behind it.
      srcs: the sources; by default every *_test.cc.
      exclude: sources of other rules.
      apart: sources that are compiled alone.
      of: the libraries under test; by default the folder's room.
      deps: further libraries.
      **kwargs: as cc_test's.
    """
    name = name or _folder() + "_test"
    if srcs == None:
        srcs = native.glob(["*_test.cc"], exclude = exclude)
    srcs = [source for source in srcs if source not in apart]
    if of == None:
        of = [":" + _folder()]
    cc_test(
        name = name,
        srcs = _together(name, srcs, "_together_test.cc") + apart,
        deps = of + deps + ["//third_party:gtest_main", "@system//:absl"],
        **kwargs
    )
