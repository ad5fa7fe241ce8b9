"""The reference of attnd's Python packages from their docstrings, as a page of the site. Reads the sources; imports nothing.

A name that a package lists in __all__ is public; it is described where it is defined.
"""
import ast
import glob
import os

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
SOURCE = os.path.join(ROOT, "client/python/attnd")
PACKAGES = {"attnd": "__init__.py", "attnd.torch": "torch.py", "attnd.transformers": "transformers.py",
            "attnd.jax": "jax.py", "attnd.aio": "aio.py", "attnd.masks": "masks/__init__.py",
            "attnd.sparse": "sparse/__init__.py", "attnd.modules": "modules/__init__.py"}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def parse(path):
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())


def public_names(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value), key=str.lower)
    return []


def definitions(tree):
    return {node.name: node for node in tree.body if isinstance(node, DEFINITIONS)}


def indented(text):
    return "\n".join(["```text", text.strip("\n"), "```"])


def signature(node, name):
    if isinstance(node, ast.ClassDef):
        made = [one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        return f"class {name}" + (f"({ast.unparse(made[0].args)})" if made else "")
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{name}({ast.unparse(node.args)}){returns}"


def described(node, name, level):
    yield f"{'#' * level} `{name}`"
    yield "```python\n" + signature(node, name) + "\n```"
    if ast.get_docstring(node):
        yield indented(ast.get_docstring(node))
    for one in node.body if isinstance(node, ast.ClassDef) else []:
        if isinstance(one, DEFINITIONS) and not one.name.startswith("_") and ast.get_docstring(one):
            yield from described(one, f"{name}.{one.name}", level + 1)


def page():
    everywhere = {}
    for path in sorted(glob.glob(os.path.join(SOURCE, "**/*.py"), recursive=True)):
        everywhere.update(definitions(parse(path)))
    parts = ["# Python reference", "Each public name, with its docstring. `help(attnd.torch.offload)` prints the same."]
    for package, path in PACKAGES.items():
        tree = parse(os.path.join(SOURCE, path))
        parts += [f"## {package}", indented(ast.get_docstring(tree))]
        own = definitions(tree)
        for name in public_names(tree):
            node = own.get(name) or everywhere.get(name)
            if node is not None:
                parts.extend(described(node, f"{package}.{name}", 3))
    return "\n\n".join(parts) + "\n"
