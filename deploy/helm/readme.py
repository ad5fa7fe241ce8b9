#!/usr/bin/env python3
"""Writes the chart's README.md from values.yaml: a row for each value, with the comment above it that begins with `# --`.

    deploy/helm/readme.py          writes it
"""
import json
import os
import re

import yaml

CHART = os.path.join(os.path.dirname(os.path.abspath(__file__)), "attnd")

HEAD = """# attnd's Helm chart

This page is for people who run attnd on Kubernetes with Helm. [docs/DEPLOY.md](../../../docs/DEPLOY.md) says what the chart
makes, and has overlays for clusters without Helm.

```sh
helm install attnd deploy/helm/attnd --namespace attnd --create-namespace --set image.repository=registry.example/attnd
helm test --namespace attnd attnd
```

A mixed fleet has several pools. Here modules on GPUs outlive their pods, and a pool of CPUs scales:

```yaml
# fleet.yaml: helm install attnd deploy/helm/attnd -f fleet.yaml
pools:
  - name: v100
    backend: cuda
    replicas: 4
    nodeSelector: {nvidia.com/gpu.family: volta}
    tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]
    state: {kind: disk, size: 100Gi}
  - name: cpu
    autoscaling: {kind: hpa, maxReplicas: 16}
```

A value that the chart does not know, or of the wrong type, is refused by name. This page is made from values.yaml by
`deploy/helm/readme.py`.

| value | default | meaning |
|---|---|---|
"""


def described(text):
    """(path, comment) of each value that has one."""
    stack, comment = [], ""
    for line in text.split("\n"):
        found = re.match(r"( *)(?:# (-- )?(.*)|([A-Za-z]\w*):.*)$", line)
        if not found:
            continue
        if found.group(4) is None:
            comment = found.group(3) if found.group(2) else f"{comment} {found.group(3)}"
            continue
        depth = len(found.group(1)) // 2
        stack = stack[:depth] + [found.group(4)]
        if comment:
            yield stack, comment
        comment = ""


def readme(text):
    values, rows = yaml.safe_load(text), ""
    for path, comment in described(text):
        default = values
        for part in path:
            default = default[part]
        rows += f"| `{'.'.join(path)}` | `{json.dumps(default)}` | {comment} |\n"
    return HEAD + rows


def main():
    with open(os.path.join(CHART, "values.yaml")) as file:
        text = readme(file.read())
    with open(os.path.join(CHART, "README.md"), "w") as file:
        file.write(text)


if __name__ == "__main__":
    main()
