//! Paths in JSON: a byte outside UTF-8 is the escape of a lone surrogate, `\udcXX`, as Python's `os.fsdecode` has it.

use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use serde::de::{self, Visitor};
use serde::ser;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;

/// The first two bytes of a surrogate between U+DC80 and U+DCFF in WTF-8, without the lowest bit.
const SURROGATE_PREFIX: [u8; 2] = [0xed, 0xb2];

/// A path of any bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WirePath(pub PathBuf);

impl From<&Path> for WirePath {
    fn from(path: &Path) -> Self {
        Self(path.to_path_buf())
    }
}

/// Writes the path as text. A byte outside UTF-8 is written as the six characters `\udcXX`.
impl fmt::Display for WirePath {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in OsStr::new(&self.0).as_bytes().utf8_chunks() {
            formatter.write_str(chunk.valid())?;
            write_escapes(formatter, chunk.invalid())?;
        }
        Ok(())
    }
}

fn write_escapes(output: &mut impl Write, bytes: &[u8]) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(output, "\\udc{byte:02x}"))
}

impl Serialize for WirePath {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Some(text) = self.0.to_str() {
            return serializer.serialize_str(text);
        }
        // serde_json writes no lone surrogates, so this text is made here.
        let mut json = String::from("\"");
        for chunk in OsStr::new(&self.0).as_bytes().utf8_chunks() {
            let quoted = serde_json::to_string(chunk.valid()).map_err(ser::Error::custom)?;
            json.push_str(&quoted[1..quoted.len() - 1]);
            write_escapes(&mut json, chunk.invalid()).map_err(ser::Error::custom)?;
        }
        json.push('"');
        RawValue::from_string(json).map_err(ser::Error::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for WirePath {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // As bytes: serde_json then accepts lone surrogates, and encodes them as WTF-8 does.
        deserializer.deserialize_bytes(PathVisitor)
    }
}

struct PathVisitor;

impl Visitor<'_> for PathVisitor {
    type Value = WirePath;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a path")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<WirePath, E> {
        Ok(WirePath(PathBuf::from(text)))
    }

    fn visit_bytes<E: de::Error>(self, mut wtf8: &[u8]) -> Result<WirePath, E> {
        let mut bytes = Vec::with_capacity(wtf8.len());
        while let Some((first, rest)) = wtf8.split_first() {
            match wtf8 {
                // U+DC80 to U+DCBF stand for the bytes 80 to BF, U+DCC0 to U+DCFF for C0 to FF.
                [a, b, last, after @ ..] if [*a, *b & !1] == SURROGATE_PREFIX => {
                    bytes.push(if b & 1 == 0 { *last } else { last | 0x40 });
                    wtf8 = after;
                }
                _ => {
                    bytes.push(*first);
                    wtf8 = rest;
                }
            }
        }
        Ok(WirePath(PathBuf::from(OsString::from_vec(bytes))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(bytes: &[u8]) -> WirePath {
        WirePath(PathBuf::from(OsStr::from_bytes(bytes)))
    }

    #[test]
    fn bytes_outside_utf8_are_lone_surrogates() {
        let json = serde_json::to_string(&path(b"a\xff\"/\xc3\xa9\n")).unwrap();
        assert_eq!(json, "\"a\\udcff\\\"/\u{e9}\\n\"");
        assert_eq!(path(b"a\xff/\xc3\xa9").to_string(), "a\\udcff/\u{e9}");
    }

    #[test]
    fn every_byte_survives_a_round_trip() {
        let all: Vec<u8> = (1..=255).collect();
        let surrogate: &[u8] = b"\xed\xb2\x80"; // no UTF-8: three bytes, not one
        for bytes in [&all, surrogate, b"\\udc80", "\u{10ff80}".as_bytes(), b""] {
            let json = serde_json::to_string(&path(bytes)).unwrap();
            assert_eq!(serde_json::from_str::<WirePath>(&json).unwrap(), path(bytes), "{json}");
        }
    }
}
