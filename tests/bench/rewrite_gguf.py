#!/usr/bin/env python3
"""rewrite_gguf.py IN OUT TYPE: the same model with its matrices in another type (F32, F16, BF16, Q4_0, Q8_0, ...), for
side-by-side figures. Needs the Python packages gguf and numpy. Vectors and metadata stay as they are."""
import sys

import gguf
import numpy as np
from gguf import quants

source, target, kind = sys.argv[1], sys.argv[2], gguf.GGMLQuantizationType[sys.argv[3].upper()]
reader = gguf.GGUFReader(source)
architecture = reader.fields["general.architecture"].contents()
writer = gguf.GGUFWriter(target, architecture)
for field in reader.fields.values():
    if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type", "general.quantization_version"):
        continue
    kinds = field.types
    if kinds[0] == gguf.GGUFValueType.ARRAY:
        writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[-1])
    else:
        writer.add_key_value(field.name, field.contents(), kinds[0])
writer.add_quantization_version(2)
for tensor in reader.tensors:
    values = quants.dequantize(tensor.data, tensor.tensor_type)
    if len(tensor.shape) == 1:
        writer.add_tensor(tensor.name, values.astype(np.float32))
    else:
        writer.add_tensor(tensor.name, quants.quantize(values, kind), raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
