//! Block tables: one arena of rows with stable addresses.
