//! Everything that must be equal for KV to be reusable.

use super::encoding::Encoder;

/// One adapter that is applied to the model.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapter {
    /// Digest of the adapter's content, or a name that changes with it.
    pub digest: String,
    /// Its scale.
    pub scale: Option<f64>,
}

/// The identity of computed KV. Two requests may share KV only if every field is equal; `None` (not stated)
/// differs from every stated value, the empty one included.
///
/// Block size is part of it, sampling parameters, stop words and priorities are not.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fingerprint {
    /// The model's name.
    pub model: Option<String>,
    /// Digest or revision of the weights. Changing weights under one name is the commonest way to serve wrong
    /// KV: a hot update must change this.
    pub model_revision: Option<String>,
    /// Revision of the tokenizer.
    pub tokenizer_revision: Option<String>,
    /// Digest of the chat template.
    pub chat_template: Option<String>,
    /// Adapters in the order of application. `Some(vec![])` says that there is none.
    pub adapters: Option<Vec<Adapter>>,
    /// Kind of the position scheme: `default`, `linear`, `llama3`, `yarn`, `none`, ...
    pub rope_type: Option<String>,
    /// Base of the rotary frequencies.
    pub rope_theta: Option<f64>,
    /// The scheme's remaining parameters in one canonical text (factors, original length, sections, partial
    /// dimensions).
    pub rope_scaling: Option<String>,
    /// Kind of the attention mask with its layer pattern: `causal`, `sliding`, `chunked`, ...
    pub attention_mask: Option<String>,
    /// Window or chunk of that mask in tokens.
    pub window: Option<u64>,
    /// Data type of the stored K and V.
    pub kv_dtype: Option<String>,
    /// Digest of the quantisation scales, or how they are stored.
    pub kv_scales: Option<String>,
    /// Where the computation changes values: sharding of MLA, kernel family, steering vectors.
    pub numerics: Option<String>,
    /// Tokens in a block.
    pub block_size: Option<u64>,
}

impl Fingerprint {
    /// The canonical bytes: equal exactly if the fingerprints are.
    #[must_use]
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut encoder = Encoder::new();
        self.encode(&mut encoder);
        encoder.finish()
    }

    pub(super) fn encode(&self, encoder: &mut Encoder) {
        encoder.text(self.model.as_deref());
        encoder.text(self.model_revision.as_deref());
        encoder.text(self.tokenizer_revision.as_deref());
        encoder.text(self.chat_template.as_deref());
        encoder.field(self.adapters.as_deref().map(encode_adapters).as_deref());
        encoder.text(self.rope_type.as_deref());
        encoder.number(self.rope_theta);
        encoder.text(self.rope_scaling.as_deref());
        encoder.text(self.attention_mask.as_deref());
        encoder.integer(self.window);
        encoder.text(self.kv_dtype.as_deref());
        encoder.text(self.kv_scales.as_deref());
        encoder.text(self.numerics.as_deref());
        encoder.integer(self.block_size);
    }
}

/// A nested encoding; its length prefix is the field's.
fn encode_adapters(adapters: &[Adapter]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for adapter in adapters {
        let mut encoder = Encoder::new();
        encoder.text(Some(&adapter.digest));
        encoder.number(adapter.scale);
        let inner = encoder.finish();
        bytes.extend((inner.len() as u32).to_le_bytes());
        bytes.extend(inner);
    }
    bytes
}
