"""Where this thread stands in a trace of OpenTelemetry, if the program uses that."""
from __future__ import annotations

import sys
from typing import Optional


def traceparent() -> Optional[str]:
    """W3C's, of the current span; None without one. Costs nothing in programs that have not imported OpenTelemetry."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
