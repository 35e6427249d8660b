//! Binary content in a patch: deflated, in base 85, 52 bytes a line, each line with its length before it.
//!
//! A file of any size passes through in pieces.

use std::io::Write;

use flate2::Compression;
use flate2::write::ZlibEncoder;
use rustix::fs::FileType;

use super::{Blob, NO_OBJECT, OUTPUT, object_name};
use crate::diff::{Reader, Side, content};
use crate::error::{Context, Error};

const DIGITS: &[u8; 85] =
    b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~";

/// Bytes that a line stands for at most.
const LINE_BYTES: usize = 52;

/// Writes the hunk that creates `side`, whose content is `blob`.
pub(super) fn write(
    side: Option<&Side>,
    blob: &Blob,
    reader: &mut Reader,
    out: &mut dyn Write,
) -> Result<(), Error> {
    writeln!(out, "literal {}", blob.size).at(OUTPUT)?;
    let mut encoder = ZlibEncoder::new(Lines { out, line: Vec::new() }, Compression::default());
    match (side, &blob.bytes) {
        (_, Some(bytes)) => encoder.write_all(bytes).at(OUTPUT)?,
        (Some(side), None) if side.kind() == FileType::RegularFile => {
            let mut outcome = Ok(());
            let name = object_name(blob.size, |digest| {
                outcome = reader.stream(side, |piece| {
                    digest.update(piece);
                    encoder.write_all(piece).at(OUTPUT)
                });
            });
            outcome?;
            // The header said what it is before this second reading.
            if name != blob.name {
                return Err(content::changed(side));
            }
        }
        _ => debug_assert_eq!(blob.name, NO_OBJECT),
    }
    let mut lines = encoder.finish().at(OUTPUT)?;
    lines.end_line().at(OUTPUT)?;
    writeln!(lines.out).at(OUTPUT)
}

/// Cuts a stream into lines of base 85.
struct Lines<'o> {
    out: &'o mut dyn Write,
    line: Vec<u8>,
}

impl Lines<'_> {
    fn end_line(&mut self) -> std::io::Result<()> {
        if self.line.is_empty() {
            return Ok(());
        }
        let text = encode(&self.line);
        self.line.clear();
        self.out.write_all(&text)
    }
}

impl Write for Lines<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        for byte in bytes {
            self.line.push(*byte);
            if self.line.len() == LINE_BYTES {
                self.end_line()?;
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(()) // a line that is not full yet must wait for more
    }
}

fn encode(bytes: &[u8]) -> Vec<u8> {
    const LAST_UPPER_CASE: u8 = 26;
    let length = u8::try_from(bytes.len()).expect("a line has at most 52 bytes");
    let mut text = vec![match length {
        1..=LAST_UPPER_CASE => b'A' + length - 1,
        _ => b'a' + length - LAST_UPPER_CASE - 1,
    }];
    for group in bytes.chunks(4) {
        let mut word = [0; 4];
        word[..group.len()].copy_from_slice(group);
        let mut value = u32::from_be_bytes(word);
        let mut digits = [0; 5];
        for digit in digits.iter_mut().rev() {
            *digit = DIGITS[(value % 85) as usize];
            value /= 85;
        }
        text.extend_from_slice(&digits);
    }
    text.push(b'\n');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_encoded_as_git_does() {
        // Git's own hunk for the empty file: an empty zlib stream.
        assert_eq!(encode(&[0x78, 1, 3, 0, 0, 0, 0, 1]), b"HcmV?d00001\n");
        assert_eq!(encode(&[0; LINE_BYTES])[0], b'z');
        assert_eq!(encode(&[0; 27])[0], b'a');
    }
}
