/** The symbols of TeX formulas, and letters in other styles, as Unicode has them. */

/** @returns {Map<string, string>} of names to what stands behind each */
const table = text => new Map(Array.from(text.matchAll(/(\S+)\s+(\S+)/g), ([, name, sign]) => [name, sign]));

/** Names that are letters. */
export const LETTERS = table(`
	alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν
	xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
	Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
	hbar ℏ ell ℓ imath ı jmath ȷ Re ℜ Im ℑ aleph ℵ wp ℘ partial ∂ nabla ∇ infty ∞ emptyset ∅ varnothing ∅ forall ∀
	exists ∃ nexists ∄ top ⊤ bot ⊥ angle ∠ triangle △ square □ blacksquare ■ checkmark ✓ dots … ldots … cdots ⋯ vdots ⋮
	ddots ⋱ dotsc … dotsb ⋯ degree ° prime ′ $ $ % % # # & & _ _ S § P ¶ dag † ddag ‡ copyright ©
`);

/** Names that are operators, relations and arrows. */
export const OPERATORS = table(`
	pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ oslash ⊘ odot ⊙ wedge ∧ land ∧
	vee ∨ lor ∨ cap ∩ cup ∪ setminus ∖ sqcup ⊔ sqcap ⊓ uplus ⊎ amalg ⨿ neg ¬ lnot ¬ dagger † wr ≀ diamond ⋄
	le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠ ll ≪ gg ≫ equiv ≡ sim ∼ simeq ≃ approx ≈ cong ≅ propto ∝ doteq ≐
	prec ≺ succ ≻ preceq ⪯ succeq ⪰ in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ nsubseteq ⊈
	mid ∣ nmid ∤ parallel ∥ perp ⊥ vdash ⊢ dashv ⊣ models ⊨ therefore ∴ because ∵ colon : coloneqq ≔ asymp ≍ lt < gt >
	to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔ implies ⟹ impliedby ⟸
	iff ⟺ mapsto ↦ longmapsto ⟼ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftrightarrow ⟺ hookrightarrow ↪
	uparrow ↑ downarrow ↓ updownarrow ↕ Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌
	leadsto ⇝ twoheadrightarrow ↠ backslash \\ surd √ , , ; ; : : ! !
`);

/** Operators whose limits stand above and below them in a display. */
export const LARGE = table(`
	sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigsqcup ⨆ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ biguplus ⨄
`);

export const INTEGRALS = table("int ∫ iint ∬ iiint ∭ oint ∮");

export const FENCES = table(`
	( ( ) ) [ [ ] ] { { } } | | lbrace { rbrace } lbrack [ rbrack ] langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋
	vert | lvert | rvert | Vert ‖ lVert ‖ rVert ‖ lgroup ⟮ rgroup ⟯ / / uparrow ↑ downarrow ↓ < ⟨ > ⟩
`);
FENCES.set("\\|", "‖");
FENCES.set(".", "");

export const ACCENTS = table(`
	hat ^ widehat ^ bar ¯ vec → tilde ~ widetilde ~ dot ˙ ddot ¨ dddot ⃛ check ˇ breve ˘ acute ´ grave \`
	mathring ˚ overrightarrow → overleftarrow ← overbrace ⏞
`);

export const UNDER = table("underbrace ⏟ underrightarrow →");

/** Functions whose argument stands below them in a display. */
export const BELOW = new Set("lim limsup liminf max min sup inf argmax argmin det gcd Pr".split(" "));

const BESIDE = "sin cos tan cot sec csc sinh cosh tanh coth arcsin arccos arctan log ln lg exp deg dim ker hom arg";
export const FUNCTIONS = new Set([...BELOW, ...BESIDE.split(" ")]);

/** Where the letters of a style begin: those that are capital, small, and digits. @type {Record<string, number[]>} */
const STYLES = {
	mathbf: [0x1d400, 0x1d41a, 0x1d7ce],
	boldsymbol: [0x1d468, 0x1d482, 0x1d7ce],
	mathcal: [0x1d49c, 0x1d4b6],
	mathfrak: [0x1d504, 0x1d51e],
	mathbb: [0x1d538, 0x1d552, 0x1d7d8],
	mathsf: [0x1d5a0, 0x1d5ba, 0x1d7e2],
	mathtt: [0x1d670, 0x1d68a, 0x1d7f6],
};

/** Letters that Unicode had before the others of their style. */
const EARLIER = table(`
	1d49d ℬ 1d4a0 ℰ 1d4a1 ℱ 1d4a3 ℋ 1d4a4 ℐ 1d4a7 ℒ 1d4a8 ℳ 1d4ad ℛ 1d4ba ℯ 1d4bc ℊ 1d4c4 ℴ 1d506 ℭ 1d50b ℌ 1d50c ℑ
	1d515 ℜ 1d51d ℨ 1d53a ℂ 1d53f ℍ 1d545 ℕ 1d547 ℙ 1d548 ℚ 1d549 ℝ 1d551 ℤ
`);

/** Write a character in a style of letters; others stay as they are. */
export function styled(character, style) {
	const place = [/[A-Z]/, /[a-z]/, /[0-9]/].findIndex(each => each.test(character));
	const begin = STYLES[style]?.[place];
	if (!begin) return character;
	const found = begin + character.charCodeAt(0) - [65, 97, 48][place];
	return EARLIER.get(found.toString(16)) ?? String.fromCodePoint(found);
}

export const isStyle = name => Object.hasOwn(STYLES, name);
