"""A line chart as a PNG file, with NumPy and zlib alone."""
import struct
import zlib

import numpy as np

COLOURS = [(214, 39, 40), (31, 119, 180), (44, 160, 44), (148, 103, 189)]
WIDTH, HEIGHT, MARGIN = 800, 480, 24


def write_curves(path, curves):
    """Draws {name: values} over their index, the first named curve widest, so that one below the other is seen."""
    canvas = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    everything = np.concatenate(list(curves.values()))
    low, high = float(everything.min()), float(everything.max())
    for part in np.linspace(0, 1, 6):
        canvas[MARGIN + round(part * (HEIGHT - 2 * MARGIN - 1)), MARGIN:-MARGIN] = 225
    for n, values in enumerate(curves.values()):
        draw(canvas, np.asarray(values), low, max(high - low, 1e-9), COLOURS[n % len(COLOURS)], 3 if n == 0 else 1)
    with open(path, "wb") as file:
        file.write(encode(canvas))


def draw(canvas, values, low, span, colour, thickness):
    """One curve, a vertical stroke in each column."""
    columns = np.arange(WIDTH - 2 * MARGIN)
    at = np.interp(columns, np.linspace(0, len(columns) - 1, len(values)), values)
    rows = np.round(MARGIN + (1 - (at - low) / span) * (HEIGHT - 2 * MARGIN - 1)).astype(int)
    for column, row, next_row in zip(columns + MARGIN, rows, np.append(rows[1:], rows[-1])):
        top, bottom = sorted((row, next_row))
        canvas[max(0, top - thickness // 2):bottom + thickness // 2 + 1, column] = colour


def encode(canvas):
    """PNG, 8-bit RGB, without filters."""
    height, width, _ = canvas.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), canvas.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
            + chunk(b"IEND", b""))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
