//! Paged attention from Rust: every instruction set against a float64 loop, and what the compiler made of it.

use kvpager_core::attention::{
    Dtype, Int32Matrix, KvScale, Options, PagedAttention, Tensor, ThreadPool, instruction_sets,
};

const BLOCK: usize = 16;
const KV_HEADS: usize = 2;

/// Numbers in -1..1 that look random, multiples of 1/128: exact in every element type.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((state >> 56) as f32 - 128.0) / 128.0
    };
    (0..len).map(next).collect()
}

/// The bytes of the numbers as elements of a type.
fn encode(values: &[f32], dtype: Dtype) -> Vec<u8> {
    let half = |bits: u32| {
        let exponent = ((bits >> 23) & 0xff).saturating_sub(112);
        let magnitude = if exponent == 0 { 0 } else { (exponent << 10) | ((bits >> 13) & 0x3ff) };
        (((bits >> 16) & 0x8000) | magnitude) as u16
    };
    let bits = values.iter().map(|value| value.to_bits());
    match dtype {
        Dtype::F32 => bits.flat_map(u32::to_ne_bytes).collect(),
        Dtype::F16 => bits.flat_map(|bits| half(bits).to_ne_bytes()).collect(),
        _ => bits.flat_map(|bits| ((bits >> 16) as u16).to_ne_bytes()).collect(),
    }
}

fn dense<const N: usize>(data: &mut [u8], dtype: Dtype, shape: [usize; N]) -> Tensor<N> {
    let mut strides = [dtype.size() as isize; N];
    for axis in (0..N - 1).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1] as isize;
    }
    assert_eq!(data.len(), shape.iter().product::<usize>() * dtype.size());
    // SAFETY: a dense view of the slice, which outlives its use in these tests.
    unsafe { Tensor::from_raw(data.as_mut_ptr(), dtype, shape, strides, true) }
}

struct Batch {
    query: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    table: Vec<i32>,
    context: usize,
    heads: usize,
    dim: usize,
}

impl Batch {
    fn new(context: usize, heads: usize, dim: usize) -> Self {
        let blocks = context.div_ceil(BLOCK);
        let table = (0..blocks as i32).rev().collect();
        let size = blocks * BLOCK * KV_HEADS * dim;
        let (keys, values) = (noise(size, 1), noise(size, 2));
        Self { query: noise(heads * dim, 3), keys, values, table, context, heads, dim }
    }

    fn run(&self, instruction_set: &str, kv_dtype: Dtype, threads: usize) -> Vec<f32> {
        let (blocks, dim) = (self.table.len(), self.dim);
        let mut query = encode(&self.query, Dtype::F32);
        let mut keys = encode(&self.keys, kv_dtype);
        let mut values = encode(&self.values, kv_dtype);
        let mut out = vec![0; self.heads * dim * 4];
        let shape = [blocks, BLOCK, KV_HEADS, dim];
        // SAFETY: a view of the table, which outlives the call.
        let block_tables = unsafe { Int32Matrix::from_raw(self.table.as_ptr(), [1, blocks], [0, 4]) };
        let request = PagedAttention {
            query: dense(&mut query, Dtype::F32, [1, self.heads, dim]),
            k_cache: dense(&mut keys, kv_dtype, shape),
            v_cache: dense(&mut values, kv_dtype, shape),
            k_scale: KvScale::One,
            v_scale: KvScale::One,
            block_tables,
            table_rows: None,
            query_start: &[0, 1],
            context_lens: &[self.context as i32],
            shared: None,
            options: Options {
                scale: 0.3,
                causal: true,
                window: None,
                softcap: None,
                alibi_slopes: None,
                sinks: None,
                instruction_set: Some(instruction_set),
            },
            out: dense(&mut out, Dtype::F32, [1, self.heads, dim]),
            lse: None,
        };
        request.run(&ThreadPool::new(threads)).expect("the batch is well formed");
        out.chunks_exact(4)
            .map(|bytes| f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
            .collect()
    }

    fn expected(&self) -> Vec<f64> {
        let mut out = Vec::new();
        for head in 0..self.heads {
            let row = |position: usize| {
                let block = self.table[position / BLOCK] as usize;
                let kv_head = head / (self.heads / KV_HEADS);
                ((block * BLOCK + position % BLOCK) * KV_HEADS + kv_head) * self.dim
            };
            let query = &self.query[head * self.dim..][..self.dim];
            let score = |position: usize| {
                let key = &self.keys[row(position)..][..self.dim];
                let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
                products.sum::<f64>() * f64::from(0.3f32)
            };
            let weights: Vec<f64> = (0..self.context).map(|position| score(position).exp()).collect();
            let total: f64 = weights.iter().sum();
            for index in 0..self.dim {
                let values = (0..self.context).map(|position| f64::from(self.values[row(position) + index]));
                out.push(values.zip(&weights).map(|(value, weight)| value * weight).sum::<f64>() / total);
            }
        }
        out
    }
}

#[test]
fn every_instruction_set_agrees_with_a_plain_loop() {
    for (context, heads, dim) in [(1, 2, 64), (77, 8, 80), (1500, 6, 128), (33, 14, 20)] {
        let batch = Batch::new(context, heads, dim);
        let expected = batch.expected();
        for name in instruction_sets() {
            for kv_dtype in [Dtype::F32, Dtype::F16, Dtype::Bf16] {
                let results = [1, 3].map(|threads| batch.run(name, kv_dtype, threads));
                assert_eq!(results[0], results[1], "{name}: threads change the result");
                for (result, expected) in results[0].iter().zip(&expected) {
                    let error = (f64::from(*result) - expected).abs();
                    assert!(error <= 1e-6, "{name} {kv_dtype:?} {context} {heads} {dim}: {error}");
                }
            }
        }
    }
}

/// An intrinsic inside a function without its target feature stays a call, at half the speed and less. This
/// reads the machine code of this very test.
#[test]
#[cfg(all(target_arch = "x86_64", not(debug_assertions)))]
fn intrinsics_of_the_kernels_are_instructions_not_calls() {
    let name = std::env::current_exe().unwrap();
    let Ok(output) =
        std::process::Command::new("objdump").args(["-d", "-C", "--no-show-raw-insn"]).arg(name).output()
    else {
        println!("objdump is not installed: nothing checked");
        return;
    };
    let text = String::from_utf8_lossy(&output.stdout);
    let calls: Vec<&str> = text
        .lines()
        .filter(|line| line.contains("call") && line.contains("core_arch") && !line.contains("xgetbv"))
        .collect();
    assert!(calls.is_empty(), "intrinsics are called: {}", calls.join("\n"));
    for wide in ["zmm", "ymm"] {
        let fused = |line: &&str| line.contains("vfmadd") && line.contains(wide);
        assert!(text.lines().filter(fused).count() > 50, "too few fused products in {wide} registers");
    }
}
