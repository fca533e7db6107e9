//! The canonical encoding of identities: injective, so different identities never get equal bytes.

/// First byte of every encoding. A change of the field list changes it.
const VERSION: u8 = 1;

/// Appends fields as tag, presence, length (u32, little endian), bytes. Tags count up from 1.
pub(super) struct Encoder {
    bytes: Vec<u8>,
    next_tag: u8,
}

impl Encoder {
    pub(super) fn new() -> Self {
        Self { bytes: vec![VERSION], next_tag: 1 }
    }

    /// One field. Absent differs from empty.
    pub(super) fn field(&mut self, value: Option<&[u8]>) {
        self.bytes.extend([self.next_tag, u8::from(value.is_some())]);
        self.next_tag += 1;
        let value = value.unwrap_or_default();
        self.bytes.extend((value.len() as u32).to_le_bytes());
        self.bytes.extend(value);
    }

    /// A text field.
    pub(super) fn text(&mut self, value: Option<&str>) {
        self.field(value.map(str::as_bytes));
    }

    /// An integer field.
    pub(super) fn integer(&mut self, value: Option<u64>) {
        self.field(value.map(u64::to_le_bytes).as_ref().map(|bytes| bytes.as_slice()));
    }

    /// A number field: its bits, so that what is computed differently is different.
    pub(super) fn number(&mut self, value: Option<f64>) {
        self.integer(value.map(f64::to_bits));
    }

    pub(super) fn finish(self) -> Vec<u8> {
        self.bytes
    }
}
