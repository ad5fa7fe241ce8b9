"""A line chart as a PNG file, with NumPy and zlib alone."""
import struct
import zlib

import numpy as np

COLOURS = [(250, 180, 120), (31, 119, 180), (44, 160, 44), (148, 103, 189)]
INK, GRID = (60, 60, 60), (225, 225, 225)
WIDTH, HEIGHT = 800, 480
LEFT, RIGHT, TOP, BOTTOM = 72, 24, 24, 56
DASH = 8

# Glyphs of 3 x 5 pixels: five octal digits, one for each row from above, the left pixel the highest bit.
GLYPHS = dict(zip("abcdefghijklmnopqrstuvwxyz0123456789.,-", (
    "25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552 65644 25573 65655 "
    "34216 72222 55557 55552 55775 55255 55222 71247 75557 26227 61247 61216 55711 74616 34757 71222 75757 75716 "
    "00002 00024 00700").split()))


def write_curves(path, curves, labels=("step", "loss")):
    """Draws {name: values} over their index; labels = (of the index, of the values).

    The first curve is wide and pale, the others lie over it in dashes by turns: curves that agree are all seen."""
    canvas = np.full((HEIGHT, WIDTH, 3), 255, np.uint8)
    everything = np.concatenate([np.asarray(values, float) for values in curves.values()])
    low, high = float(everything.min()), float(everything.max())
    span = max(high - low, 1e-9)
    last = max(len(values) for values in curves.values()) - 1
    for part in np.linspace(0, 1, 6):
        row = HEIGHT - BOTTOM - 1 - round(part * (HEIGHT - TOP - BOTTOM - 1))
        canvas[row, LEFT:-RIGHT] = GRID
        write(canvas, f"{low + part * span:.3g}".rjust(6), 8, row - 5)
        number = f"{part * last:.0f}"
        write(canvas, number, LEFT + round(part * (WIDTH - LEFT - RIGHT)) - 4 * len(number), HEIGHT - BOTTOM + 8)
    write(canvas, labels[0], WIDTH - RIGHT - 8 * len(labels[0]), HEIGHT - 24)
    write(canvas, labels[1], LEFT, 6)
    for n, (name, values) in enumerate(curves.items()):
        colour = COLOURS[n % len(COLOURS)]
        dashes = (n - 1, len(curves) - 1) if n else (0, 1)
        draw(canvas, np.asarray(values, float), low, span, colour, 7 if n == 0 else 1, dashes)
        row = TOP + 8 + 20 * n
        canvas[row + 3:row + 8, WIDTH - 280:WIDTH - 256] = colour
        write(canvas, name, WIDTH - 248, row)
    with open(path, "wb") as file:
        file.write(encode(canvas))


def write(canvas, text, column, row):
    """Text in capitals, twice the glyphs' size, from its upper left corner."""
    for n, letter in enumerate(text.lower()):
        for y, bits in enumerate(GLYPHS.get(letter, "00000")):
            for x in range(3):
                if int(bits) >> (2 - x) & 1:
                    left = column + 8 * n + 2 * x
                    canvas[row + 2 * y:row + 2 * y + 2, left:left + 2] = INK


def draw(canvas, values, low, span, colour, thickness, dashes):
    """One curve, a vertical stroke in each column of its turns: dashes = (turn, of how many)."""
    columns = np.arange(WIDTH - LEFT - RIGHT)
    at = np.interp(columns, np.linspace(0, len(columns) - 1, len(values)), values)
    rows = np.round(TOP + (1 - (at - low) / span) * (HEIGHT - TOP - BOTTOM - 1)).astype(int)
    for column, row, next_row in zip(columns, rows, np.append(rows[1:], rows[-1])):
        if column // DASH % dashes[1] == dashes[0]:
            top, bottom = sorted((row, next_row))
            canvas[max(0, top - thickness // 2):bottom + thickness // 2 + 1, LEFT + column] = colour


def encode(canvas):
    """PNG, 8-bit RGB, without filters."""
    height, width, _ = canvas.shape
    rows = np.concatenate([np.zeros((height, 1), np.uint8), canvas.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
            + chunk(b"IEND", b""))


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
