//! Who may share a prefix.

use super::encoding::Encoder;

/// The tenants among whom cached prefixes are shared.
///
/// Names are compared byte for byte and encoded with their length, so no name can imitate another one or
/// another kind of scope.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ShareScope {
    /// One tenant.
    Private(String),
    /// One tenant, narrowed by a salt that its client chose. A salt can only narrow: it never names another
    /// tenant's prefixes.
    Salted {
        /// The tenant, from the caller's handle.
        tenant: String,
        /// The client's bytes.
        salt: Vec<u8>,
    },
    /// The members of a named group.
    Group(String),
    /// Everybody, by explicit publish.
    Public(String),
}

impl ShareScope {
    /// Appends kind, name and salt, each tagged and length-prefixed.
    pub(super) fn encode(&self, encoder: &mut Encoder) {
        let (kind, name, salt): (u8, &str, Option<&[u8]>) = match self {
            Self::Private(tenant) => (1, tenant, None),
            Self::Salted { tenant, salt } => (1, tenant, Some(salt)),
            Self::Group(name) => (2, name, None),
            Self::Public(name) => (3, name, None),
        };
        encoder.field(Some(&[kind]));
        encoder.field(Some(name.as_bytes()));
        encoder.field(salt);
    }

    /// The scope without a client's salt.
    #[must_use]
    pub fn without_salt(&self) -> Self {
        match self {
            Self::Salted { tenant, .. } => Self::Private(tenant.clone()),
            other => other.clone(),
        }
    }
}
