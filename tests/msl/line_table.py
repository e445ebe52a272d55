"""From an address in a compiled kernel to the kernel's line.

Reads the DWARF 4 line table of a 64-bit ELF file; any other file has no lines.
"""

from __future__ import annotations

import bisect
import struct
from dataclasses import dataclass
from pathlib import Path

_COPY, _ADVANCE_PC, _ADVANCE_LINE, _SET_FILE, _CONST_ADD_PC, _FIXED_ADVANCE_PC = 1, 2, 3, 4, 8, 9
_END_SEQUENCE, _SET_ADDRESS = 1, 2


class LineTable:
    """The rows of all functions, by address."""

    def __init__(self, path: Path, file_name: str) -> None:
        section = _section(path.read_bytes(), ".debug_line")
        self._rows: list[tuple[int, int]] = []  # (address, line), 0 where there is none
        at = 0
        while at < len(section):
            length = struct.unpack_from("<I", section, at)[0]
            self._rows += _Program(section[at + 4 : at + 4 + length], file_name).rows()
            at += 4 + length
        self._rows.sort()

    def line(self, address: int) -> int:
        """The line that the instruction before `address` (a return address) belongs to, or 0."""
        at = bisect.bisect_right(self._rows, (address - 1, 1 << 31)) - 1
        while at >= 0 and self._rows[at][1] == 0:  # made by the compiler: belongs to what precedes
            at -= 1
        return self._rows[at][1] if at >= 0 else 0


@dataclass
class _Reader:
    data: bytes
    at: int = 0

    def number(self, format: str) -> int:
        (value,) = struct.unpack_from("<" + format, self.data, self.at)
        self.at += struct.calcsize("<" + format)
        return int(value)

    def text(self) -> str:
        end = self.data.index(0, self.at)
        value = self.data[self.at : end].decode()
        self.at = end + 1
        return value

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.number("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    def signed(self) -> int:
        start = self.at
        value = self.unsigned()
        bits = 7 * (self.at - start)
        return value - (1 << bits) if value >> (bits - 1) else value


class _Program:
    """One compilation unit's line-number program (DWARF 4, section 6.2)."""

    def __init__(self, unit: bytes, file_name: str) -> None:
        header = _Reader(unit)
        version = header.number("H")
        if version != 4:
            raise ValueError(f"a line table of DWARF version {version}, not 4")
        header_length = header.number("I")
        self.code = _Reader(unit, header.at + header_length)
        self.min_length = header.number("B")
        header.number("B")  # operations per instruction
        header.number("B")  # is_stmt by default
        self.line_base = header.number("b")
        self.line_range = header.number("B")
        self.opcode_base = header.number("B")
        self.operands = [header.number("B") for _ in range(self.opcode_base - 1)]
        while header.text():
            pass  # directories
        self.files = set()
        index = 1
        while name := header.text():
            if name == file_name or name.endswith("/" + file_name):
                self.files.add(index)
            for _ in range(3):
                header.unsigned()
            index += 1

    def rows(self) -> list[tuple[int, int]]:
        rows: list[tuple[int, int]] = []
        address, line, file = 0, 1, 1
        code = self.code
        while code.at < len(code.data):
            opcode = code.number("B")
            if opcode >= self.opcode_base:
                step, forward = divmod(opcode - self.opcode_base, self.line_range)
                address += step * self.min_length
                line += self.line_base + forward
                rows.append((address, line if file in self.files else 0))
            elif opcode == 0:
                length = code.unsigned()
                end = code.at + length
                extended = code.number("B")
                if extended == _SET_ADDRESS:
                    address = code.number("Q")
                elif extended == _END_SEQUENCE:
                    rows.append((address, 0))
                    address, line, file = 0, 1, 1
                code.at = end
            elif opcode == _COPY:
                rows.append((address, line if file in self.files else 0))
            elif opcode == _ADVANCE_PC:
                address += code.unsigned() * self.min_length
            elif opcode == _ADVANCE_LINE:
                line += code.signed()
            elif opcode == _SET_FILE:
                file = code.unsigned()
            elif opcode == _CONST_ADD_PC:
                address += (255 - self.opcode_base) // self.line_range * self.min_length
            elif opcode == _FIXED_ADVANCE_PC:
                address += code.number("H")
            else:
                for _ in range(self.operands[opcode - 1]):
                    code.unsigned()
        return rows


def _section(elf: bytes, wanted: str) -> bytes:
    """The contents of a section of a 64-bit little-endian ELF file; empty for anything else."""
    if elf[:6] != b"\x7fELF\x02\x01":
        return b""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names = headers[names_index][4]
    for name, _, _, _, offset, length in headers:
        start = names + name
        if elf[start : elf.index(0, start)].decode() == wanted:
            return elf[offset : offset + length]
    return b""
