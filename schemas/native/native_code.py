"""The loops of schemas.native.native_loops, in LLVM's language.

For i < n:
- ``digests``: if state: update(state, at[i], bytes); out[i] = hash(at[i], bytes, seeds[i])
- ``gather``: to[i][:bytes] = at[i][:bytes], with the next piece (its second page too) on its way from memory meanwhile;
  if hash: out[i] = hash(to[i], bytes, seeds[i]), of the copy while the processor's first cache has it
- ``scaled``: x[64 i:64 i + 64] = float32(q[64 i:64 i + 64]) × scales[i]
- ``decoded``: ``scaled`` of a row of so many blocks, into x; x[at[j]] = values[j] for its ``kept`` entries; if narrow:
  narrow(x, into the row of y), while the processor's first cache has it. x is at ``x_step`` bytes further on every row:
  0 where it is but a place to work in
- ``to_bfloat16``, ``to_float16``: y[64 i:64 i + 64] = x[64 i:64 i + 64], nearest, ties to even. By whole numbers, since
  not every processor has instructions for it; where float16 has no normal number, adding 0.5 rounds at its last bit.
- ``from_float16``: y[64 i:64 i + 64] = x[64 i:64 i + 64] as float32, by whole numbers too; what is no normal float16
  counts units of 2^-24
- ``crc``: crc = tables[7][x & 255] ^ tables[6][x >> 8 & 255] ^ … ^ tables[0][x >> 56] where x = words[i] ^ crc
"""

from __future__ import annotations

from typing import Final

__all__ = ["CODE"]

_HASHED: Final = """\
  %seed_i = getelementptr i64, ptr %seeds, i64 %i
  %out_i = getelementptr i64, ptr %out, i64 %i
  %seed = load i64, ptr %seed_i
  %digest = call i64 %hash(ptr ADDRESS, i64 %bytes, i64 %seed)
  store i64 %digest, ptr %out_i
"""


def _hashed(address: str) -> str:
    """Piece i, which lies at ``address``, hashed with its seed into its place."""
    return _HASHED.replace("ADDRESS", address)


_BLOCKS: Final = """
define void @NAME(i64 %n, PARAMETERS) {
start:
  %any = icmp ne i64 %n, 0
  br i1 %any, label %block, label %end
block:
  %i = phi i64 [0, %start], [%next, %block]
  %first = shl i64 %i, 6
BODY  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %block, label %end
end:
  ret void
}
"""


def _blocks(name: str, parameters: str, body: str) -> str:
    """A function that does ``body`` for n blocks of 64 numbers; %first is the number of a block's first."""
    return _BLOCKS.replace("NAME", name).replace("PARAMETERS", parameters).replace("BODY", body)


_NARROWING: Final = """\
  %x_i = getelementptr float, ptr %x, i64 %first
  %y_i = getelementptr i16, ptr %y, i64 %first
  %numbers = load <64 x float>, ptr %x_i, align 4
  %bits = bitcast <64 x float> %numbers to <64 x i32>
  %nan = fcmp uno <64 x float> %numbers, %numbers
BODY  %narrow = trunc <64 x i32> %found to <64 x i16>
  store <64 x i16> %narrow, ptr %y_i, align 2
"""


def _narrowing(dtype: str, body: str) -> str:
    """The function that makes 16 bits of float32, in which ``body`` finds them: %found of %numbers, %bits, %nan."""
    return _blocks(f"to_{dtype}", "ptr %x, ptr %y", _NARROWING.replace("BODY", body))


_LOOKED_UP: Final = "".join(f"""\
  %b{byte} = lshr i64 %x, {8 * byte}
  %i{byte} = and i64 %b{byte}, 255
  %t{byte} = getelementptr [8 x [256 x i32]], ptr %tables, i64 0, i64 {7 - byte}, i64 %i{byte}
  %v{byte} = load i32, ptr %t{byte}
""" for byte in range(8))
_JOINED: Final = "".join(f"  %r{byte} = xor i32 %{f'r{byte - 1}' if byte > 1 else 'v0'}, %v{byte}\n"
                         for byte in range(1, 8))

_DIGESTS: Final = """
define void @digests(ptr %hash, ptr %update, ptr %state, i64 %n, ptr %at, i64 %bytes, ptr %seeds, ptr %out) {
start:
  %any = icmp ne i64 %n, 0
  %streamed = icmp ne ptr %state, null
  br i1 %any, label %piece, label %end
piece:
  %i = phi i64 [0, %start], [%next, %row]
  %at_i = getelementptr ptr, ptr %at, i64 %i
  %address = load ptr, ptr %at_i
  br i1 %streamed, label %stream, label %row
stream:
  %error = call i32 %update(ptr %state, ptr %address, i64 %bytes)
  br label %row
row:
HASHED  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %piece, label %end
end:
  ret void
}
""".replace("HASHED", _hashed("%address"))

_GATHER: Final = """
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)

define void @gather(ptr %hash, i64 %n, ptr %at, i64 %bytes, ptr %to, ptr %seeds, ptr %out) {
start:
  %any = icmp ne i64 %n, 0
  %hashed = icmp ne ptr %hash, null
  %large = icmp ugt i64 %bytes, 4096
  %page = select i1 %large, i64 4096, i64 0
  br i1 %any, label %piece, label %end
piece:
  %i = phi i64 [0, %start], [%next, %copied]
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  %ahead = select i1 %more, i64 %next, i64 %i
  %at_ahead = getelementptr ptr, ptr %at, i64 %ahead
  %soon = load ptr, ptr %at_ahead
  %soon_too = getelementptr i8, ptr %soon, i64 %page
  call void @llvm.prefetch.p0(ptr %soon, i32 0, i32 3, i32 1)
  call void @llvm.prefetch.p0(ptr %soon_too, i32 0, i32 3, i32 1)
  %at_i = getelementptr ptr, ptr %at, i64 %i
  %to_i = getelementptr ptr, ptr %to, i64 %i
  %source = load ptr, ptr %at_i
  %target = load ptr, ptr %to_i
  call void @llvm.memcpy.p0.p0.i64(ptr %target, ptr %source, i64 %bytes, i1 false)
  br i1 %hashed, label %row, label %copied
row:
HASHED  br label %copied
copied:
  br i1 %more, label %piece, label %end
end:
  ret void
}
""".replace("HASHED", _hashed("%target"))

_SCALED: Final = _blocks("scaled", "ptr %q, ptr %scales, ptr %x", """\
  %q_i = getelementptr i8, ptr %q, i64 %first
  %scale_i = getelementptr float, ptr %scales, i64 %i
  %x_i = getelementptr float, ptr %x, i64 %first
  %codes = load <64 x i8>, ptr %q_i, align 1
  %scale = load float, ptr %scale_i
  %numbers = sitofp <64 x i8> %codes to <64 x float>
  %one = insertelement <64 x float> poison, float %scale, i64 0
  %all = shufflevector <64 x float> %one, <64 x float> poison, <64 x i32> zeroinitializer
  %product = fmul <64 x float> %numbers, %all
  store <64 x float> %product, ptr %x_i, align 4
""")

_DECODED: Final = """
define void @decoded(i64 %n, i64 %blocks, ptr %q, ptr %scales, i64 %kept, ptr %at, ptr %values, ptr %narrow, ptr %x,
                     i64 %x_step, ptr %y) {
start:
  %width = shl i64 %blocks, 6
  %any = icmp ne i64 %n, 0
  %any_kept = icmp ne i64 %kept, 0
  %narrowed = icmp ne ptr %narrow, null
  br i1 %any, label %row, label %end
row:
  %i = phi i64 [0, %start], [%next, %done]
  %first = mul i64 %i, %width
  %first_block = mul i64 %i, %blocks
  %x_first = mul i64 %i, %x_step
  %first_kept = mul i64 %i, %kept
  %q_i = getelementptr i8, ptr %q, i64 %first
  %scales_i = getelementptr float, ptr %scales, i64 %first_block
  %x_i = getelementptr i8, ptr %x, i64 %x_first
  %y_i = getelementptr i16, ptr %y, i64 %first
  call void @scaled(i64 %blocks, ptr %q_i, ptr %scales_i, ptr %x_i)
  br i1 %any_kept, label %entry, label %whole
entry:
  %j = phi i64 [0, %row], [%next_j, %entry]
  %entry_j = add i64 %first_kept, %j
  %at_j = getelementptr i64, ptr %at, i64 %entry_j
  %value_j = getelementptr float, ptr %values, i64 %entry_j
  %column = load i64, ptr %at_j
  %value = load float, ptr %value_j
  %x_j = getelementptr float, ptr %x_i, i64 %column
  store float %value, ptr %x_j
  %next_j = add i64 %j, 1
  %more_kept = icmp ult i64 %next_j, %kept
  br i1 %more_kept, label %entry, label %whole
whole:
  br i1 %narrowed, label %round, label %done
round:
  call void %narrow(i64 %blocks, ptr %x_i, ptr %y_i)
  br label %done
done:
  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %row, label %end
end:
  ret void
}
"""

_TO_BFLOAT16: Final = _narrowing("bfloat16", """\
  %last = lshr <64 x i32> %bits, splat (i32 16)
  %odd = and <64 x i32> %last, splat (i32 1)
  %half = add <64 x i32> %bits, splat (i32 32767)
  %up = add <64 x i32> %half, %odd
  %rounded = lshr <64 x i32> %up, splat (i32 16)
  %found = select <64 x i1> %nan, <64 x i32> splat (i32 32704), <64 x i32> %rounded
""")

_TO_FLOAT16: Final = _narrowing("float16", """\
  %top = lshr <64 x i32> %bits, splat (i32 16)
  %sign = and <64 x i32> %top, splat (i32 32768)
  %size = and <64 x i32> %bits, splat (i32 2147483647)
  %last = lshr <64 x i32> %size, splat (i32 13)
  %odd = and <64 x i32> %last, splat (i32 1)
  %half = add <64 x i32> %size, splat (i32 3355447295)
  %up = add <64 x i32> %half, %odd
  %normal = lshr <64 x i32> %up, splat (i32 13)
  %magnitude = bitcast <64 x i32> %size to <64 x float>
  %sum = fadd <64 x float> %magnitude, splat (float 0.5)
  %sum_bits = bitcast <64 x float> %sum to <64 x i32>
  %small = sub <64 x i32> %sum_bits, splat (i32 1056964608)
  %is_small = icmp ult <64 x i32> %size, splat (i32 947912704)
  %finite = select <64 x i1> %is_small, <64 x i32> %small, <64 x i32> %normal
  %is_large = icmp uge <64 x i32> %size, splat (i32 1199570944)
  %bounded = select <64 x i1> %is_large, <64 x i32> splat (i32 31744), <64 x i32> %finite
  %unsigned = select <64 x i1> %nan, <64 x i32> splat (i32 32256), <64 x i32> %bounded
  %found = or <64 x i32> %unsigned, %sign
""")

_FROM_FLOAT16: Final = _blocks("from_float16", "ptr %x, ptr %y", """\
  %x_i = getelementptr i16, ptr %x, i64 %first
  %y_i = getelementptr float, ptr %y, i64 %first
  %narrow = load <64 x i16>, ptr %x_i, align 2
  %bits = zext <64 x i16> %narrow to <64 x i32>
  %size = and <64 x i32> %bits, splat (i32 32767)
  %sign = and <64 x i32> %bits, splat (i32 32768)
  %moved = shl <64 x i32> %size, splat (i32 13)
  %normal = add <64 x i32> %moved, splat (i32 939524096)
  %units = uitofp <64 x i32> %size to <64 x float>
  %small = fmul <64 x float> %units, splat (float 0x3E70000000000000)
  %small_bits = bitcast <64 x float> %small to <64 x i32>
  %is_small = icmp ult <64 x i32> %size, splat (i32 1024)
  %finite = select <64 x i1> %is_small, <64 x i32> %small_bits, <64 x i32> %normal
  %is_large = icmp uge <64 x i32> %size, splat (i32 31744)
  %bound = select <64 x i1> %is_large, <64 x i32> splat (i32 2139095040), <64 x i32> zeroinitializer
  %unsigned = or <64 x i32> %finite, %bound
  %top = shl <64 x i32> %sign, splat (i32 16)
  %found = or <64 x i32> %unsigned, %top
  %numbers = bitcast <64 x i32> %found to <64 x float>
  store <64 x float> %numbers, ptr %y_i, align 4
""")

_CRC: Final = """
define i32 @crc(i64 %n, ptr %words, ptr %tables, i32 %start_crc) {
start:
  %any = icmp ne i64 %n, 0
  br i1 %any, label %word, label %end
word:
  %i = phi i64 [0, %start], [%next, %word]
  %crc = phi i32 [%start_crc, %start], [%r7, %word]
  %at = getelementptr i64, ptr %words, i64 %i
  %data = load i64, ptr %at, align 1
  %wide = zext i32 %crc to i64
  %x = xor i64 %data, %wide
BODY  %next = add i64 %i, 1
  %more = icmp ult i64 %next, %n
  br i1 %more, label %word, label %end
end:
  %found = phi i32 [%start_crc, %start], [%r7, %word]
  ret i32 %found
}
""".replace("BODY", _LOOKED_UP + _JOINED)

CODE: Final = _DIGESTS + _GATHER + _SCALED + _DECODED + _TO_BFLOAT16 + _TO_FLOAT16 + _FROM_FLOAT16 + _CRC
