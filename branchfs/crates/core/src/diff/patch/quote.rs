//! Names in a patch: as they are, or in quotes with C escapes where a byte could be misread.

use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// `prefix` and `path` as git writes them with `core.quotePath`.
pub(super) fn quoted(prefix: &str, path: &Path) -> String {
    let bytes = path.as_os_str().as_bytes();
    let needs_quotes =
        |byte: &u8| byte.is_ascii_control() || !byte.is_ascii() || *byte == b'"' || *byte == b'\\';
    if !bytes.iter().any(needs_quotes) {
        return format!("{prefix}{}", String::from_utf8_lossy(bytes));
    }
    let mut text = format!("\"{prefix}");
    for byte in bytes {
        match byte {
            b'"' => text.push_str("\\\""),
            b'\\' => text.push_str("\\\\"),
            b'\n' => text.push_str("\\n"),
            b'\t' => text.push_str("\\t"),
            b'\r' => text.push_str("\\r"),
            byte if needs_quotes(byte) => text.push_str(&format!("\\{byte:03o}")),
            byte => text.push(char::from(*byte)),
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_could_be_misread_are_quoted() {
        let quote = |bytes: &[u8]| quoted("a/", Path::new(std::ffi::OsStr::from_bytes(bytes)));
        assert_eq!(quote(b"a plain name"), "a/a plain name");
        assert_eq!(quote(b"li\nne"), "\"a/li\\nne\"");
        assert_eq!(quote(b"\xff\"\\\x01"), "\"a/\\377\\\"\\\\\\001\"");
    }
}
